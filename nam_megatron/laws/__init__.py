"""Every rule on what a recipe may say, a module to a theme; `law.py` says what one is, `book.py` has them all."""
