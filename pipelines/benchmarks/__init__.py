"""What measures draftkit: `python -m pipelines.benchmark` runs it.

`decoder` times decoding beside Hugging Face, `training` a step beside TRL, `gpu` all that needs a
GPU. Nothing of it is deployed.
"""
