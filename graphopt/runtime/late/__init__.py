"""Updates that run one call late, the tensors that they change, and how a use settles these."""
