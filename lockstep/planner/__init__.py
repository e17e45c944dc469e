"""Says before a run how long its steps take under a plan, and why: pure functions of spec values, no torch.

(Run, Profile, Cluster, Plan) → `step_work` → StepWork → `cost` (closed form) or `simulate` (events).
"""
