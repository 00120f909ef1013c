"""What one group has on one site, each at its best (`piece`, `load`, `filling`), priced so that pieces add up
(`prices`, `demand`); gradients are waited for after that (`gradients`).
"""
