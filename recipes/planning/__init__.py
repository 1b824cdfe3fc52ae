"""What a training run will cost, reckoned without a GPU and without processes.

    hardware   rates of a machine, from a TOML table
    problem    the sizes of a run, from torchtitan's configuration
    work       blocks that each rank executes in each ring step, exactly
    traffic    bytes that travel, and over which links
    timing     the time line of a step
    crossover  the length from which on sparse attention pays
    memory     what is allocated at the moments that can be the peak
    compare    all of it for each layout and rotation
    report     in words
    measure    one real step on one GPU, to hold the rest against

Functions over dataclasses; `recipes.plan` is the command line. Letters, beyond those of
`mtraining_flex.layout`: M ranks of a node, O nodes of a ring, P parameters, F width of
the feed-forward, L layers, V vocabulary.
"""
