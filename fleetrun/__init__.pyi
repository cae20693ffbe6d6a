from fleetrun.api import Job as Job
from fleetrun.api import launch as launch

__version__: str
