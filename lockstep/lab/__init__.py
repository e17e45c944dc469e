"""The laboratory: parallel training of CNNs built up rung by rung, each measured on the machine at hand."""
