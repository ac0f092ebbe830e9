"""Puts the flight records of all ranks side by side: who was where, in words and in pictures.

``align`` finds out which operations belong together, ``findings`` says what is wrong with them, and
``chrome`` draws them.
"""
