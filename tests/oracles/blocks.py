"""The blocks of a model as an oracle sees them. Nothing here comes from depthmix."""


class Blocks:
    """N blocks of named sites, S sites in all; from a number: so many blocks of attention and an MLP."""

    def __init__(self, blocks):
        if isinstance(blocks, Blocks):
            blocks = blocks.names
        self.names = [("attention", "mlp")] * blocks if isinstance(blocks, int) else [tuple(b) for b in blocks]
        self.N, self.S = len(self.names), sum(len(b) for b in self.names)
        self.sites = []  # of each block
        self.attention = []  # sites with queries, keys and values of what they read
        s = 0
        for names in self.names:
            self.sites.append(list(range(s, s + len(names))))
            for name in names:
                if name.endswith("attention") and not name.endswith("cross_attention"):
                    self.attention.append(s)
                s += 1

    def ways(self, i, ways):
        """Of reader i of a block-level rule: several where a block's first site is attention, one elsewhere and at the end."""
        return ways if i < self.N and self.sites[i][0] in self.attention else 1
