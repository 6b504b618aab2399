"""The PaddleSlim engine: the only package that imports paddle, run in an environment of its own.

`python -m lathe.paddle VERB` has the verbs prune, quantize, analyze, evaluate and export, with the
recipes, options and folders of `lathe VERB`. Importing this package does not import paddle:
`lathe.engines.paddle` is what the stages of the torch engine call, `lathe.engines.pdparams` reads
and writes PaddleFleetX's checkpoints with numpy alone.
"""
