"""How a model is evaluated: loss, accuracy and metrics, through the host or by the stages of a pipeline."""
