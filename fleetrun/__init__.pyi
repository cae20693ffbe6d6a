from fleetrun.interface import Job as Job
from fleetrun.interface import LaunchResult as LaunchResult
from fleetrun.interface import launch as launch

__version__: str
