"""From sizes and a budget to the batches of any epoch: arrays and integers, no state."""
