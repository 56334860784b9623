from monitor.failures import Failures
from monitor.pipeline.pipeline import MAX_WARNINGS, BackpressureBudget


def test_steps_that_meet_the_full_queue_one_after_the_other_share_a_budget():
    patience = BackpressureBudget(1.0, Failures())
    patience.spend(0.75)
    assert patience.left == 0.25
    patience.spend(0.25)
    assert patience.left == 0.0


def test_the_budget_is_whole_again_once_the_incident_is_over():
    patience = BackpressureBudget(1.0, Failures())
    patience.spend(1.0)
    patience.restore()
    assert patience.left == 1.0


def test_an_incident_is_warned_about_once_with_how_long_from_where_and_what_to_do(caplog):
    patience = BackpressureBudget(1.5, Failures(rank=3))
    patience.spend(1.5)
    for step in range(12, 20):
        patience.drop(step)
    [record] = caplog.records
    for part in ("[rank 3]", "1.5 s", "From step 12 on", "queue_bytes", "step_interval"):
        assert part in record.getMessage()


def test_the_end_of_an_incident_says_how_many_steps_it_cost(caplog):
    patience = BackpressureBudget(0.0, Failures())
    patience.spend(0.0)
    for step in range(8):
        patience.drop(step)
    patience.restore()
    assert "8 steps dropped" in caplog.records[-1].getMessage()


def test_an_incident_that_waiting_was_enough_for_is_not_mentioned(caplog):
    patience = BackpressureBudget(1.0, Failures())
    patience.spend(0.5)
    patience.restore()
    assert not caplog.records


def test_log_lines_are_bounded_whatever_the_number_of_incidents(caplog):
    patience = BackpressureBudget(0.0, Failures())
    for step in range(100):
        patience.spend(0.0)
        patience.drop(step)
        patience.restore()
    assert len(caplog.records) == 2 * MAX_WARNINGS + 1
