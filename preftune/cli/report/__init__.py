"""`preftune report`: runs read from their folders, summed up as curves, findings and tables, and written as one page.

Nothing here trains or loads a model, and the page loads nothing.
"""
