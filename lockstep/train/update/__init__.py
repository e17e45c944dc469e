"""The update of weights by gradients: by groups of parameters, and what looks at whole parameters."""
