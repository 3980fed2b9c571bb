"""The verdict of a case, from its records alone: no model, no text, no engine."""

from __future__ import annotations

from kvtriage.cli.case_folder.folder import CaseFolder
from kvtriage.cli.case_folder.layout import CHECKPOINT, CHECKPOINT_PER_TENSOR
from kvtriage.cli.terminal import say_there, stage
from kvtriage.kvcache.policy import Scaling
from kvtriage.records.evidence import Evidence
from kvtriage.records.frontier import Frontier
from kvtriage.records.plan import Plan
from kvtriage.records.scales import ScaleRecord
from kvtriage.records.sensitivities import Sensitivities
from kvtriage.records.verdict import Verdict
from kvtriage.stages.decide import decide
from kvtriage.stages.examine import examine
from kvtriage.stages.explain import explain
from kvtriage.stages.search import adopt

__all__ = ["explain_case", "judge_case", "need_suspects", "run_decide"]


def need_suspects(case: CaseFolder) -> Sensitivities:
    """sensitivities.json, its suspects replaced by the set in frontier.json where there is one."""
    return adopt(case.need(Sensitivities), case.load(Frontier))


def run_decide(case: CaseFolder) -> Verdict:
    """verdict.json, from the records alone."""
    there = case.load(Verdict)
    if there is not None:
        say_there("decide", "verdict.json")
        return there
    with stage("decide"):
        verdict = judge_case(case, case.need(Plan))
    case.save(verdict)
    return verdict


def judge_case(case: CaseFolder, plan: Plan) -> Verdict:
    """The verdict by the rule of `plan`, which may be another than the case's own. Writes nothing."""
    scales, sensitivities, evidence = case.need(ScaleRecord), need_suspects(case), case.need(Evidence)
    trials, imports, inputs = case.trials(), case.imports(), case.inputs_for(Verdict)

    def verdict_with(checkpoint: str) -> Verdict:
        folder = case.path.resolve() / checkpoint
        holding = str(folder) if folder.is_dir() else None
        return decide(plan, scales, sensitivities, evidence, trials, holding, inputs=inputs, imports=imports)

    verdict = verdict_with(CHECKPOINT)
    if verdict.choice is not None and verdict.choice.scaling == Scaling.PER_TENSOR:
        return verdict_with(CHECKPOINT_PER_TENSOR)
    return verdict


def explain_case(case: CaseFolder, plan: Plan) -> str:
    """The way to the verdict by the rule of `plan`, clause by clause."""
    records = (case.need(ScaleRecord), need_suspects(case), case.need(Evidence))
    return "\n".join(explain(examine(plan, *records, case.trials(), None, case.imports())))
