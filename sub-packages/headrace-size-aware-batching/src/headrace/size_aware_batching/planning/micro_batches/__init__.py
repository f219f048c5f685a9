"""One optimizer step: samples into R ranks times K micro-batches, all budgets kept, the work balanced. Pure.

Everything that is compared is an integer, so that ranks on different processors plan alike.

`sums` does so in these steps; `padded`, `groups` and `contexts` plan what its micro-batches cannot be.

1. `bounds.fewest`           a lower bound on the micro-batches gives K.
2. `bounds.row_targets`      the highest work of each micro-step, from a linear program with K unknowns. Its optimum is
                             a lower bound, and its solution is the target: nearly the whole quality is here.
3. `filling.fill_to_targets` samples, largest first, to the micro-batch that lacks most of its target and has room.
                             `filling.fill_kinds`, where there are several kinds of work: the target is the mean.
4. `filling.packed`          only if that left some over a budget: the swaps of the epoch's planner; then its packing;
                             then first fit; then the next K.
5. `balancing.polish`        (`level`, `even_parts`) swaps and exchanges of two samples for two between pairs of
                             micro-batches, while that pays.
6. `balancing.assign_ranks`  the micro-batches of a micro-step onto ranks, so that their totals are even, too.
"""
