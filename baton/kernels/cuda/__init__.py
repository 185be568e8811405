"""What the ops' ``cuda.cu`` include, how nvcc and g++ (the SIMT shim) build them, the gates on what came out."""
