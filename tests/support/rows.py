"""Rows of a linear program, kept instead of solved."""

import itertools


class Recorder:
    """Rows as they come, and what they say of a time at given values."""

    def __init__(self, groups):
        variables = itertools.count()
        self.tokens = [next(variables) for _ in groups]
        self.parts = [
            [next(variables) for _ in (group.shape if not group.on_one_site else ())] for group in groups
        ]
        self.held = self.parts
        self._next, self.rows = variables, []

    def time(self, count=0):
        return next(self._next)

    def above(self, time, terms, at_least=0.0):
        self.rows.append((time, terms, at_least))

    def least(self, terms, values):
        """A sum with every time as short as rows allow."""
        known = dict(values)

        def value(variable):
            if variable not in known:
                said = [
                    at_least + sum(value(one) * often for one, often in row)
                    for time, row, at_least in self.rows
                    if time == variable
                ]
                known[variable] = max([0.0, *said])
            return known[variable]

        return sum(value(variable) * often for variable, often in terms)
