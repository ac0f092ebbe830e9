"""Puts the flight records of all ranks side by side: who was where, in words and in pictures.

``align`` finds out which operations belong together, ``findings`` says what is wrong with them,
``chrome`` draws them, and ``torch_format`` writes them as torch's own analyser reads them.
"""
