"""The PaddleSlim engine: the only package that imports paddle, run in an environment of its own.

`python -m lathe.paddle VERB` has the verbs prune, quantize, analyze, evaluate and export, with the
recipes, options and folders of `lathe VERB`. What needs no paddle
is in `lathe.backends`: the start of its processes, and PaddleFleetX's checkpoints by numpy alone.
"""
