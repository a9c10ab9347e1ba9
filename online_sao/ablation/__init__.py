"""`online-sao ablate`: the paper's comparisons on tiny tasks, with the real trainer."""
