"""Small changes of layouts (`moves`, `tune`, `improve`); CP-SAT on whole tokens and heads (`solver`)."""
