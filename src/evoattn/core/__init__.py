"""The ground: values of a call, numbers, layouts, devices, and tiles as data. Imports nothing above it."""
