"""The theory of DeepCrossAttention (Heddes et al. 2025, arXiv 2502.06785, section 4) as code that checks it.

    y = A x + noise, x ~ N(0, I_d);   layers f_t(z) = V_t z of rank r_t;   r* = Σ r_t < d, the collective rank

A network of such layers computes Â x, and its excess risk is E||A x - Â x||². Which Â it can be depends on how layers are mixed:

    residual {I + M}    GRN-v1 {αI + M}    GRN-v2 {D + M, D diagonal}    GRN-v3 ⊃ {(D + M)x + relu(wᵀx) x}    rank M ≤ r*

risk.py holds risks and their bounds (Theorems 4.1 and 4.2), rank.py what parameters buy (Theorem 4.3, Lemma C.1, Proposition 4.4),
toy.py the training of Figure 1. `python -m lab.theory --out FOLDER` draws all of it.
"""
