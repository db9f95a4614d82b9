"""What the published folders of each family say about its architecture, and the same in miniature.

One file per family, each with `SIZES`: "tiny", "full" and the family's further variants. Numbers only. Parameters are
counted in billions (B) or millions (M).
"""
