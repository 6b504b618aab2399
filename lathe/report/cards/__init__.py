"""Model cards and bills of materials, written from what Lathe's folders already hold."""
