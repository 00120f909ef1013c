"""One domain's best layout (`domain`).

Groupings are tried (`groupings`, `descend`; `guess`, `tried`), the best of them balanced (`balance`), and the
best of these polished (`polish`, `solver`).
"""
