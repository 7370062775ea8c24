"""The one table of the admin API. Server, OpenAPI document and tests are made from it."""

from __future__ import annotations

from typing import Final

from controller.api import (
    bodies,
    capacity,
    devices,
    fabrics,
    fit,
    fleet,
    logs,
    models,
    placement,
    results,
    usage,
    views,
    weights,
    what_if,
)
from controller.api import device_views as seen
from controller.api.call import Route
from controller.api.node_views import NodePage, NodeView
from controller.api.paging import PageQuery
from controller.api.tenancy_routes import TENANCY
from controller.catalog.definition import Model

PREFIX: Final = "/api/v1"

ROUTES: Final = (
    Route("GET", "/summary", fleet.summary, results.Summary, "The fleet at a glance"),
    Route("GET", "/nodes", fleet.nodes, list[NodeView], "Every node", PageQuery),
    Route("GET", "/nodes/{id}", fleet.node, NodePage, "One node with everything about it"),
    Route(
        "POST", "/nodes/{id}/state", fleet.set_state, results.NodeState,
        "Cordon, drain or give back a node; acted on at once", body=bodies.NodeStateBody,
    ),
    Route(
        "POST", "/nodes/enroll", fleet.enroll, results.Enrolment,
        "Make an enrolment token, shown once", body=bodies.EnrollBody,
    ),
    Route(
        "POST", "/nodes/{id}/revoke", fleet.revoke, results.Revoked,
        "Lock a node's agent out", body=bodies.Nothing,
    ),
    Route(
        "GET", "/nodes/{id}/logs", logs.logs, None,
        "Tail of the agent's or a shard's log, as text or server-sent events", bodies.LogsQuery,
        deadline_s=logs.ANSWER_S + 10,
    ),
    Route(
        "POST", "/nodes/{id}/gpus/{gpu}/mark", devices.mark, seen.Marked,
        "Say that a card is healthy or unhealthy", body=bodies.MarkBody,
    ),
    Route("DELETE", "/nodes/{id}/gpus/{gpu}", devices.forget, seen.Forgotten,
          "Forget a card that was taken out"),
    Route("GET", "/doctor", devices.doctor, list[seen.CheckView],
          "Checks of nodes with evidence and remedy", bodies.DoctorQuery),
    Route("GET", "/events", devices.events, list[seen.EventView],
          "Changes of devices, newest first", bodies.EventsQuery),
    Route("GET", "/nvlink", devices.nvlink, list[seen.NvlinkView],
          "Multi-node NVLink domains, and what keeps each node out", PageQuery),
    Route("GET", "/fabrics", fabrics.fabrics, list[seen.FabricView],
          "Physical fabrics against the names that settings declare", PageQuery),
    Route("GET", "/fabrics/{id}/topology", fabrics.topology, seen.TopologyView,
          "The map of a fabric, by its id or key", deadline_s=fabrics.MAP_S),
    Route("POST", "/fabrics/{id}/scan", fabrics.scan, seen.ScanStarted,
          "Ask one node on a fabric to map it", body=bodies.Nothing),
    Route("GET", "/controllers", fleet.controllers, list[views.ControllerView],
          "Control and router processes, who leads, and whose catalog file is applied", PageQuery),
    Route("GET", "/models", models.models, list[views.ModelView], "The catalog", PageQuery),
    Route("POST", "/models", models.add, results.Added, "Add or change a model", body=Model),
    Route("DELETE", "/models/{name}", models.remove, results.Removed, "Remove a model"),
    Route(
        "POST", "/models/{name}/scale", models.scale, results.Scaled,
        "How many replicas a model has", body=bodies.ScaleBody,
    ),
    Route("PUT", "/models/{name}/capacity", capacity.put, capacity.CapacityView,
          "Keep a measurement of one replica", body=capacity.CapacityBody),
    Route("GET", "/capacity", capacity.capacity, list[capacity.CapacityView],
          "How much one replica serves, as last measured", capacity.CapacityQuery),
    Route("GET", "/prices", models.prices, list[views.PriceView],
          "What models cost and cost before, by model, newest first", bodies.PricesQuery),
    Route(
        "POST", "/catalog", models.apply_catalog, results.Applied,
        "Apply a catalog file, or show what it would change",
        bodies.ApplyQuery, bodies.CatalogBody,
    ),
    Route(
        "GET", "/replicas", placement.replicas, list[views.ReplicaView],
        "Replicas that are not gone", bodies.ReplicasQuery,
    ),
    Route("GET", "/replicas/{id}", placement.replica, views.ReplicaView, "One replica"),
    Route(
        "POST", "/replicas/{id}/replace", placement.replace, results.Replacing,
        "Another replica in its stead, ready first", body=bodies.ReplaceBody,
    ),
    Route(
        "POST", "/models/{name}/replace", placement.replace_all, results.Replacing,
        "A rolling restart of a model's replicas", body=bodies.ReplaceModelBody,
    ),
    Route(
        "GET", "/explain-placement", placement.explain, views.ExplainView,
        "Why a model is or is not placed", bodies.ExplainQuery,
    ),
    Route(
        "GET", "/fit", fit.fit, fit.FitView,
        "What a model needs of each card, line by line, and whether it fits", fit.FitQuery,
    ),
    Route(
        "GET", "/decisions", placement.decisions, list[views.DecisionView],
        "What was decided, newest first", bodies.DecisionsQuery,
    ),
    Route(
        "POST", "/what-if", what_if.ask, results.WhatIf,
        "What the planner would do on a changed fleet; nothing is done", body=bodies.WhatIfBody,
        deadline_s=what_if.DEADLINE_S,
    ),
    *TENANCY,
    Route("GET", "/usage", usage.usage_by, list[usage.ScopeUsageView],
          "What was used by org, team, user, key or model", usage.UsageQuery),
    Route("GET", "/usage/rows", usage.usage_rows, list[usage.UsageRowView],
          "Single requests, newest or oldest first", usage.UsageRowsQuery),
    Route("GET", "/weights", fleet.weights, list[views.WeightView],
          "Weights on the nodes' disks", PageQuery),
    Route("GET", "/weights/orphans", weights.orphans, list[views.OrphanView],
          "Downloads that no model and no live shard uses", bodies.OrphansQuery),
    Route("POST", "/weights/collect", weights.collect, results.Collected,
          "Remove downloads that nobody needs", body=bodies.CollectBody,
          deadline_s=weights.COLLECT_S + 10),
)  # fmt: skip
