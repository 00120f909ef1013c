"""One domain's best grouping (`domain`), and replicas (`replicas`).

Groupings are tried (`groupings`, `descend`, `wander`; `guess`, `tried`), the best of them balanced
(`balance`), and the best of these polished (`polish`).
"""
