"""Side by side with TRL: speed, memory, preparation and start-up times, measured in one run.

`python -m benchmarks.run` is the one entry; nothing here is imported by the package.
"""
