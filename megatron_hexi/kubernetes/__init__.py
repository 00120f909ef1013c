"""A job as Kubernetes manifests, and the program that its pods start.

`settings`: the user's choices, checked. `products`: NVIDIA's labels of nodes by GPU. `pods`: the pods of a
plan, of an elastic job or of a probe, and the commands of each. `manifests`: the objects, and their YAML.
`start`: reads the commands of its pod inside the container and runs them.
"""
