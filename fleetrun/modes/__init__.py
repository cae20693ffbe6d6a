"""Pure layouts: which ranks there are, and who must finish."""
