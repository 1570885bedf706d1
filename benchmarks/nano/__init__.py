"""Everything that made `checkpoints/nano`: its world, its training, its export and its evaluation.

Read `scenes` and `tasks` for what the model is taught, `network` for how it is trained. README.md
says how to run it again.
"""
