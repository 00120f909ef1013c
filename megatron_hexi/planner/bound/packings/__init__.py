"""Which groups the units can form at once, and the least that takes (`packing`).

By fractions of groups (`program`, `worth`), by groups one inside the other (`nested`, `nested_worth`), and
where few packings are left, by whole groups (`whole`, `wholly`). What the search may have missed is read off
(`placing`).
"""
