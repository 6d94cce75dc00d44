"""In the place of nvidia-resiliency-ext, whose only wheel is named for a newer glibc than a test host need have."""
