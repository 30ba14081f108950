"""Programs that measure this repository: where the figures in results/ come from."""
