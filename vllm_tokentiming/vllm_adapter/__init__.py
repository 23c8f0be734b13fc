"""The seam to vLLM: requests out of the batch, rows into the rejection sampler, patches."""
