"""Headers that the ops' ``cuda.cu`` include, building them by nvcc or by g++ on the SIMT shim, and checks of the
result.
"""
