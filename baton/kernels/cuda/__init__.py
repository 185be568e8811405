"""Holds what the ops' ``cuda.cu`` include, how nvcc and g++ (the SIMT shim) build them, and the gates on what came
out.
"""
