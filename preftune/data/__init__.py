"""From the rows that users have to the trees that models score: formats, templates, tokens, packing, collation.

A row is checked where it enters, and what cannot be used is counted and reported, never dropped in silence.
"""
