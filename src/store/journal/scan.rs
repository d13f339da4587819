//! Reads the journal, one file after the other, newest first.

use super::entry::Entry;
use super::frame::{Frame, Head, frames};
use super::segments::{SEGMENT_BYTES, SEGMENT_READ_MAX, Segment};
use super::{FileJournal, hex, seq};
use berth_kernel::decision::{Decision, Filter};
use berth_kernel::ports::{Input, JournalError, Visit};
use std::collections::HashMap;
use std::io;

/// Most bytes of the files that one scan reads: some tens of milliseconds.
const SCAN_BYTES: u64 = 4 * SEGMENT_BYTES;
/// Most files that one scan reads: each start of the daemon creates one.
const SCAN_FILES: usize = 64;

impl FileJournal {
    /// Passes the matching decisions to `visit`, newest first, until it returns false. Returns the number
    /// before which to continue.
    pub(super) fn scan(
        &self,
        filter: &Filter,
        with_inputs: bool,
        visit: &mut Visit<'_>,
    ) -> Result<Option<u64>, JournalError> {
        let (segments, next) = self.select_segments(filter.before, SCAN_FILES)?;
        for segment in segments {
            let bytes = self.read(&segment)?;
            let decisions: Vec<_> = frames(&bytes).filter_map(|frame| Some((seq(&frame)?, frame))).collect();
            let nodes = if with_inputs { nodes(&bytes) } else { HashMap::new() };
            // The clock may have been set back, so a single old decision does not end the scan; a file with
            // only old ones does.
            let since = filter.since_wall_ms.unwrap_or(0);
            let is_old = |frame: &Frame<'_>| matches!(frame.head, Head::Decision { at_wall_ms, .. } if at_wall_ms < since);
            let is_too_old = !decisions.is_empty() && decisions.iter().all(|(_, frame)| is_old(frame));
            for (seq, frame) in decisions.into_iter().rev() {
                if filter.before.is_some_and(|before| seq >= before) {
                    continue;
                }
                // An unreadable decision, perhaps of a later release, is skipped.
                let Ok((decision, input)) = self.decode(&frame, seq, &nodes) else {
                    tracing::debug!(seq, "cannot read a decision of the journal");
                    continue;
                };
                if filter.matches(&decision) && !visit(decision, input) {
                    return Ok(Some(seq + 1));
                }
            }
            if is_too_old {
                return Ok(None);
            }
        }
        Ok(next)
    }

    /// The decision of this number, with the policies' input.
    pub(super) fn read_decision(
        &self,
        wanted: u64,
    ) -> Result<Option<(Decision, Option<Input>)>, JournalError> {
        let (segments, _) = self.select_segments(wanted.checked_add(1), 1)?;
        let Some(segment) = segments.first() else { return Ok(None) };
        let bytes = self.read(segment)?;
        let Some(frame) = frames(&bytes).find(|frame| seq(frame) == Some(wanted)) else {
            return Ok(None);
        };
        self.decode(&frame, wanted, &nodes(&bytes)).map(Some)
    }

    /// Decodes a decision, with its input if its node is in `nodes`.
    fn decode(
        &self,
        frame: &Frame<'_>,
        seq: u64,
        nodes: &HashMap<String, Frame<'_>>,
    ) -> Result<(Decision, Option<Input>), JournalError> {
        let body = frame.body().map_err(|e| self.damaged(seq, e))?;
        let mut entry: Entry = serde_json::from_slice(&body).map_err(|e| self.damaged(seq, e))?;
        let question = entry.question.take();
        let decision = entry.into_decision().map_err(|e| self.damaged(seq, e))?;
        let node = decision.input.as_ref().and_then(|digest| nodes.get(digest.as_str()));
        let input = match (node, question) {
            (Some(node), Some(question)) => Some(Input {
                node: node.body().map_err(|e| self.damaged(seq, e))?,
                question: question.get().as_bytes().to_vec(),
            }),
            _ => None,
        };
        Ok((decision, input))
    }

    /// The newest files that may contain a number below `before`, and the number before which to continue.
    fn select_segments(
        &self,
        before: Option<u64>,
        files_max: usize,
    ) -> Result<(Vec<Segment>, Option<u64>), JournalError> {
        let mut state = self.lock_mut();
        self.write(&mut state)?;
        let older = |segment: &&Segment| before.is_none_or(|before| segment.first < before);
        let mut selected: Vec<Segment> = state.segments.list.iter().rev().filter(older).cloned().collect();
        let mut bytes = 0;
        let overflow = selected.iter().position(|segment| {
            bytes += segment.bytes;
            bytes > SCAN_BYTES
        });
        let files_max = files_max.min(overflow.map_or(usize::MAX, |files| files.max(1)));
        let has_more = selected.len() > files_max;
        selected.truncate(files_max);
        let next = selected.last().filter(|_| has_more).map(|last| last.first);
        Ok((selected, next))
    }

    /// The time of a file's first decision, milliseconds since 1970.
    pub(super) fn first_wall_ms(&self, segment: &Segment) -> Option<u64> {
        let bytes = self.read(segment).ok()?;
        frames(&bytes).find_map(|frame| match frame.head {
            Head::Decision { at_wall_ms, .. } => Some(at_wall_ms),
            Head::Node { .. } => None,
        })
    }

    /// The file's bytes; none if it was deleted meanwhile.
    pub(super) fn read(&self, segment: &Segment) -> Result<Vec<u8>, JournalError> {
        match berth_files::read(&segment.path, SEGMENT_READ_MAX) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
            read => read.map_err(|e| self.error("cannot be read", e)),
        }
    }

    fn damaged(&self, seq: u64, error: impl std::fmt::Display) -> JournalError {
        let what = format!(
            "decision {seq} is damaged ({error}); to discard the journal, stop berth and delete the folder"
        );
        JournalError { path: self.folder.display().to_string(), what, source: None }
    }
}

/// The nodes of a file by digest.
fn nodes(bytes: &[u8]) -> HashMap<String, Frame<'_>> {
    frames(bytes)
        .filter_map(|frame| match frame.head {
            Head::Node { digest } => Some((hex(&digest), frame)),
            Head::Decision { .. } => None,
        })
        .collect()
}
