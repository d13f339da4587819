//! The command for an action that the API names in a problem.

use berth_api::{Action, Operation, Problem};

/// A problem's detail, with the hint and the command for its action in further lines.
pub(super) fn message(problem: &Problem) -> String {
    let mut text = problem.detail.clone();
    let command = problem.action.as_ref().map(|action| format!("`{}`", command(action)));
    let lines = [problem.hint.clone(), command];
    let advice = lines.into_iter().flatten().collect::<Vec<_>>().join(": ");
    if !advice.is_empty() {
        text += &format!("\n  {advice}");
    }
    text
}

fn command(action: &Action) -> String {
    let id = action.parameter("id").unwrap_or("ID");
    match action.operation {
        Operation::ListGpus => "berth gpu list".into(),
        Operation::GetGpu => format!("berth gpu show {}", action.parameter("uuid").unwrap_or("UUID")),
        Operation::ListAllocations => "berth allocation list".into(),
        Operation::EndAllocation => {
            let force = if action.parameter("force") == Some("true") { " --force" } else { "" };
            format!("berth allocation end {id}{force}")
        }
        Operation::ListPolicies => "berth policy list".into(),
        Operation::UploadPolicy => "berth policy push FILE".into(),
        Operation::GetStack => "berth policy stack".into(),
        Operation::ActivateStack => "berth policy activate FILE".into(),
        Operation::ListActivations => "berth policy history".into(),
        Operation::ListShadows => "berth policy shadow list".into(),
        Operation::EndShadow => format!("berth policy shadow stop {id}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use berth_api::Kind;

    #[test]
    fn a_problem_is_shown_with_the_command_for_its_action() {
        let mut problem = Problem::new(Kind::Running, "allocation 7-1 is still in use");
        assert_eq!(message(&problem), "allocation 7-1 is still in use");
        problem.hint = Some("delete the pod, or end it".into());
        problem.action = Some(Action::new(Operation::EndAllocation, &[("id", "7-1"), ("force", "true")]));
        let expected =
            "allocation 7-1 is still in use\n  delete the pod, or end it: `berth allocation end 7-1 --force`";
        assert_eq!(message(&problem), expected);
    }

    #[test]
    fn every_action_has_a_command() {
        for operation in Operation::ALL {
            assert!(command(&Action::from(*operation)).starts_with("berth "), "{operation:?}");
        }
    }
}
