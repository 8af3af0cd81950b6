from hypothesis import HealthCheck, settings

settings.register_profile(
    "adumbra", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
settings.load_profile("adumbra")
