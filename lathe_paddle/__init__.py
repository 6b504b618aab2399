"""The PaddleSlim engine: the only package that imports paddle, run in an environment of its own.

`python -m lathe_paddle VERB` has the verbs prune, quantize, analyze, evaluate and export, with the
recipes, options and folders of `lathe VERB`. Code that does not need paddle is in
`lathe.backends`: it starts these processes, and converts PaddleFleetX's checkpoints with numpy
alone.
"""
