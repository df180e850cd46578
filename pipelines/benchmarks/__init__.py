"""What measures draftkit: scripts, `python -m pipelines.benchmarks.NAME`.

`decoder` times decoding beside Hugging Face, `training` a step beside TRL; `drift` is traffic that
drifts. Nothing of it is deployed.
"""
