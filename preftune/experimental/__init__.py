"""Import paths that users bring with them, and what may still change between minor versions.

Nothing in the stable packages imports from here.
"""
