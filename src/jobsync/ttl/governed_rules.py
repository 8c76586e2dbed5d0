"""The rules of expiry that a TTL plugin wants for the resources that it governs.

They are checked against the schemas, and against the archives of other resources: archived
records never come back.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from jobsync.database.archive import check_archive, check_archived
from jobsync.database.definition import Definition, Rule
from jobsync.errors import Invalid
from jobsync.ttl.settings import GovernedResource

if TYPE_CHECKING:
    from jobsync.database.database import Database

__all__ = ["GovernedRules"]


class GovernedRules:
    """The rules of the resources that a plugin governs.

    Args:
        governed: the resources, by name.
        get_database: returns the database, which knows their definitions.
    """

    def __init__(
        self, governed: Mapping[str, GovernedResource], get_database: "Callable[[], Database]"
    ) -> None:
        self._governed = governed
        self._get_database = get_database

    def choose(self, definition: Definition) -> Sequence[Rule]:
        """Return the rule of a resource; none if it is not governed, or not described yet.

        Raises:
            Invalid: the schema, or the rule of another resource, does not fit the options.
        """
        governed = self._governed.get(definition.name)
        if governed is None or _must_wait(governed, definition):
            return ()
        rule = governed.options.resolve(definition.schema)
        if rule.on_expire == "archive":
            self._check_circle(definition.name)
            if not self._is_archive(definition.name):
                check_archived(f"resources.{definition.name}", definition.schema)
        return [rule]

    def check_all(self) -> None:
        """Check the rules of all resources that exist.

        Raises:
            Invalid: a schema does not fit the options.
        """
        resources = self._get_database().resources
        for name, governed in self._governed.items():
            if name in resources:
                self.choose(resources[name].definition)
            archive = governed.options.archive_resource
            if archive is not None and archive in resources:
                place = f"resources.{name}.archive_resource"
                check_archive(place, archive, resources[archive].schema)

    async def store(self, name: str) -> bool:
        """Store the rule of a resource; return whether it has one.

        Raises:
            Invalid: the schema does not fit the options.
        """
        database = self._get_database()
        if name not in database.resources:
            return False
        # Asks `choose`.
        resource = await database.define_resource(name)
        return resource.definition.expiry is not None

    def _check_circle(self, name: str) -> None:
        """Check that archived records never come back, also by the rules that others have stored.

        Raises:
            Invalid: they would.
        """
        way = [name]
        while (archive := self._find_archive(way[-1])) is not None and archive not in way:
            way.append(archive)
        if archive == name:
            place = f"resources.{name}.archive_resource"
            problem = f"moves records in a circle: {' to '.join([*way, name])}"
            fix = f'write archive_resource="{name}_archive", or drop_expiry("{way[-1]}")'
            raise Invalid(place, way[1], problem, fix)

    def _find_archive(self, name: str) -> str | None:
        """Return where the records of a resource are archived, as far as this process knows."""
        if name in self._governed:
            return self._governed[name].options.archive_resource
        resources = self._get_database().resources
        rule = resources[name].definition.expiry if name in resources else None
        return None if rule is None else rule.archive_resource

    def _is_archive(self, name: str) -> bool:
        """Whether records of another resource are archived here."""
        others = {*self._governed, *self._get_database().resources}
        return any(self._find_archive(each) == name for each in others)


def _must_wait(governed: GovernedResource, definition: Definition) -> bool:
    """Whether a resource has to be described first, so that its expiry is known."""
    options = governed.options
    given = (options.ttl, options.field, options.default_ttl)
    return given == (None, None, None) and not definition.is_declared
