"""Model cards and bills of materials, generated from Lathe's output folders."""
