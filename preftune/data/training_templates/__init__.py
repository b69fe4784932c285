"""Jinja templates that come with the package: `twin.jinja`, around which a tokenizer's own template is wrapped.

Read with `importlib.resources`; `preftune.data.model_templates` fills in what is written `<like this>`.
"""
