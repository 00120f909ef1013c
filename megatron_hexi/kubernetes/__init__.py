"""A job as Kubernetes manifests, and what its pods start.

`settings`: what the user chooses, checked. `products`: how NVIDIA labels nodes by GPU. `pods`: the pods of a
plan, of an elastic job or of a probe, and the commands of each. `manifests`: the objects, and their YAML.
`start`: reads its pod's commands inside the container and runs them.
"""
