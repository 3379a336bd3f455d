"""Host memory: mapped, pinned chunk by chunk in the background, near the GPU, shared by ranks."""
