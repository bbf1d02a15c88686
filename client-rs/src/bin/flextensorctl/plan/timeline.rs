//! A pass as a picture: when the device computes, when it waits, when the link copies.

use std::fmt::Write as _;

use flextensord_plan::output::KeyForecast;

use super::Planned;

/// Where the pass begins and how long it is drawn, in pixels.
const LEFT: f64 = 110.0;
const WIDTH: f64 = 1400.0;
/// A lane and the room between two batch keys.
const LANE: f64 = 34.0;
const TOP: f64 = 56.0;
const KEY: f64 = 4.0 * LANE + 30.0;

pub(super) fn draw(planned: &Planned<'_>) -> String {
    let keys = &planned.plan.forecast.keys;
    let height = TOP + KEY * keys.len() as f64;
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{:.0}\" height=\"{height:.0}\" \
         font-family=\"sans-serif\" font-size=\"12\">\n\
         <rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n",
        LEFT + WIDTH + 20.0
    );
    text(&mut svg, 10.0, 22.0, &title(planned));
    for (number, key) in keys.iter().enumerate() {
        one_key(&mut svg, planned, key, TOP + KEY * number as f64);
    }
    svg.push_str("</svg>\n");
    svg
}

fn title(planned: &Planned<'_>) -> String {
    let plan = planned.plan;
    format!(
        "{} - {}, {:.1} MB held, {:.1} MB moved in a pass",
        planned.name,
        plan.choice.strategy.name(),
        plan.held_bytes() as f64 / 1e6,
        plan.streamed_bytes as f64 / 1e6
    )
}

fn one_key(svg: &mut String, planned: &Planned<'_>, key: &KeyForecast, top: f64) {
    let caption = format!(
        "{} step {:.3} ms, budget bound {:.3} ms, plan floor {:.3} ms",
        key.name,
        key.step_s * 1e3,
        key.budget_bound_s * 1e3,
        key.plan_floor_s * 1e3
    );
    text(svg, LEFT, top - 6.0, caption.trim());
    let lane = |number: f64| top + LANE * number;
    for (name, number) in [("compute", 0.0), ("waits", 1.0), ("copies", 2.0)] {
        text(svg, 10.0, lane(number) + 20.0, name);
    }
    let mut bars = Bars {
        svg,
        step: key.step_s,
    };
    for span in &key.computes {
        let name = &planned.model.layers[span.of as usize];
        bars.bar(lane(0.0), span.start_s, span.end_s, "#4878a8", name);
    }
    for transfer in &key.transfers {
        let name = &planned.model.parts[transfer.part as usize];
        bars.bar(lane(2.0), transfer.start_s, transfer.end_s, "#d08840", name);
        // what is waited for has just arrived
        let begin = transfer.end_s - transfer.wait_s;
        bars.bar(lane(1.0), begin, transfer.end_s, "#b03a3a", name);
    }
    for tenth in 0..=10 {
        let at = f64::from(tenth) / 10.0;
        let time = format!("{:.2} ms", at * key.step_s * 1e3);
        text(svg, LEFT + at * WIDTH - 14.0, lane(3.0) + 14.0, &time);
    }
}

/// Bars of a pass that comes round: what begins before it, or ends behind it, is drawn at
/// the other side.
struct Bars<'a> {
    svg: &'a mut String,
    step: f64,
}

impl Bars<'_> {
    fn bar(&mut self, top: f64, start: f64, end: f64, colour: &str, name: &str) {
        if end <= start || self.step <= 0.0 {
            return;
        }
        for turn in [-1.0, 0.0, 1.0] {
            let begin = (start + turn * self.step).max(0.0) / self.step;
            let end = (end + turn * self.step).min(self.step) / self.step;
            if begin < end {
                let _ = writeln!(
                    self.svg,
                    "<rect x=\"{:.2}\" y=\"{top:.0}\" width=\"{:.2}\" height=\"{:.0}\" \
                     fill=\"{colour}\" stroke=\"white\" stroke-width=\"0.3\">\
                     <title>{}</title></rect>",
                    LEFT + begin * WIDTH,
                    (end - begin) * WIDTH,
                    LANE - 6.0,
                    escaped(name)
                );
            }
        }
    }
}

fn text(svg: &mut String, x: f64, y: f64, text: &str) {
    let _ = writeln!(
        svg,
        "<text x=\"{x:.0}\" y=\"{y:.0}\">{}</text>",
        escaped(text)
    );
}

fn escaped(text: &str) -> String {
    let mut safe = String::with_capacity(text.len());
    for character in text.chars() {
        match character {
            '<' => safe.push_str("&lt;"),
            '>' => safe.push_str("&gt;"),
            '&' => safe.push_str("&amp;"),
            '"' => safe.push_str("&quot;"),
            // XML knows no other control characters
            other if other.is_control() => safe.push('\u{fffd}'),
            other => safe.push(other),
        }
    }
    safe
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_cannot_leave_their_text() {
        assert_eq!(escaped("a<b>&\"\x1b"), "a&lt;b&gt;&amp;&quot;\u{fffd}");
    }

    #[test]
    fn what_begins_before_the_pass_is_drawn_at_its_end() {
        let drawn = |start, end| {
            let mut svg = String::new();
            let mut bars = Bars {
                svg: &mut svg,
                step: 2.0,
            };
            bars.bar(0.0, start, end, "red", "p");
            svg.matches("<rect").count()
        };
        assert_eq!(drawn(-0.5, 0.5), 2);
        assert_eq!(drawn(0.5, 1.5), 1);
        assert_eq!(drawn(0.5, 0.5), 0);
    }
}
