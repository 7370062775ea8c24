"""The part of the table in `routes.py` that is about tenants: scopes, keys, budgets, users."""

from __future__ import annotations

from typing import Final

from controller.api import audit, bodies, budgets, keys, limits, results, scopes, users, views
from controller.api.call import Route
from controller.api.paging import PageQuery

TENANCY: Final = (
    Route("GET", "/scopes", scopes.scopes, list[scopes.ScopeView],
          "Organisations, teams and users", scopes.ScopesQuery),
    Route("POST", "/scopes", scopes.create, scopes.ScopeView, "Make a scope",
          body=scopes.ScopeBody),
    Route("POST", "/scopes/{name}/change", scopes.change, scopes.ScopeView,
          "Change what a scope says", body=scopes.ChangeScopeBody),
    Route("POST", "/scopes/{name}/move", scopes.move, scopes.ScopeView,
          "Move a scope with all below it", body=scopes.MoveBody),
    Route("POST", "/scopes/{name}/rename", scopes.rename, scopes.ScopeView, "Rename a scope",
          body=scopes.RenameBody),
    Route("DELETE", "/scopes/{name}", scopes.delete, scopes.ScopeDeleted,
          "Delete a scope with all below it, and revoke their keys"),
    Route("GET", "/keys", keys.keys, list[views.KeyView], "Clients' keys", keys.KeysQuery),
    Route("POST", "/keys", keys.create, results.NewKey, "Make a key, shown once",
          body=keys.KeyBody),
    Route("POST", "/keys/{id}/change", keys.change, views.KeyView,
          "Other models, networks, tags or another end for a key", body=keys.ChangeKeyBody),
    Route("POST", "/keys/{id}/rotate", keys.rotate, results.RotatedKey,
          "A new secret for a key, shown once", body=keys.RotateBody),
    Route("POST", "/keys/{id}/move", keys.move, results.MovedKey, "Put a key into a scope",
          body=keys.MoveKeyBody),
    Route("DELETE", "/keys/{id}", keys.revoke, results.Revoked, "Revoke a key"),
    Route("GET", "/budgets", budgets.budgets, list[budgets.BudgetView],
          "What scopes and keys may spend, and spent", budgets.BoundsQuery),
    Route("POST", "/budgets", budgets.put, budgets.BudgetView,
          "Set what a scope or key may spend in a period", body=budgets.BudgetBody),
    Route("DELETE", "/budgets/{id}", budgets.remove, budgets.BoundRemoved, "Remove a budget"),
    Route("GET", "/budget-events", budgets.events, list[budgets.BudgetEvent],
          "Budgets that passed a threshold, newest first", budgets.EventsQuery),
    Route("GET", "/limits", limits.limits, list[limits.LimitView],
          "What scopes and keys may ask for", budgets.BoundsQuery),
    Route("POST", "/limits", limits.put, limits.LimitView,
          "Set what a scope or key may ask for", body=limits.LimitBody),
    Route("DELETE", "/limits/{id}", limits.remove, budgets.BoundRemoved, "Remove a limit"),
    Route("GET", "/users", users.users, list[users.UserView], "Who may log in", PageQuery),
    Route("POST", "/users", users.create, users.UserChanged, "Let somebody log in",
          body=users.UserBody),
    Route("POST", "/users/{id}/password", users.change_password, users.UserChanged,
          "Another password; every session ends", body=users.PasswordBody),
    Route("DELETE", "/users/{id}", users.remove, users.UserRemoved, "May log in no more"),
    Route("POST", "/login", users.login, users.LoggedIn, "A session, for a name and a password",
          body=users.LoginBody),
    Route("POST", "/logout", users.logout, users.LoggedOut, "End the session that is sent",
          body=bodies.Nothing),
    Route("GET", "/audit", audit.audit, list[audit.AuditView], "Who changed what, newest first",
          audit.AuditQuery),
)  # fmt: skip
