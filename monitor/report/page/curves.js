'use strict'
// Curves by uPlot, and a table behind each picture.

const DASHES = [[], [8, 4], [2, 3], [10, 3, 2, 3]], TABLE_ROWS = 500

const plain = value => value === null || value === undefined ? '' : typeof value === 'number' ? number(value) : String(value)

function number(value) {
  if (!Number.isFinite(value)) return String(value)
  return Number.isInteger(value) && Math.abs(value) < 1e9 ? String(value) : String(Number(value.toPrecision(6)))
}

// A table that is made when it is opened. rows(i) gives the cells of row i: texts, numbers, or functions that fill the cell.
function tableBehind(parent, title, heads, count, row) {
  const details = element('details', parent)
  element('summary', details, title)
  const box = element('div', details)
  details.addEventListener('toggle', () => { if (details.open && !box.firstChild) fillTable(box, heads, count, row) })
  return details
}

function fillTable(parent, heads, count, row, first = 0) {
  const table = element('table', parent), head = element('tr', element('thead', table)), body = element('tbody', table)
  for (const one of heads) element('th', head, one).scope = 'col'
  const more = element('button', parent, 'more rows')
  more.type = 'button'
  const add = () => {
    const end = Math.min(count, first + TABLE_ROWS)
    for (; first < end; first++) {
      const { cells, name } = row(first), line = element('tr', body, undefined, name)
      for (const one of cells) typeof one === 'function' ? one(element('td', line)) : element('td', line, plain(one))
    }
    more.hidden = first >= count
  }
  more.addEventListener('click', add)
  add()
  return table
}

const colour = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim()

class Curve {
  // lines: { label, values }, of a value for each column; options.logarithmic: zeros are left out.
  constructor(parent, title, steps, lines, options) {
    this.parent = parent
    Object.assign(this, { title, steps, lines, options })
    this.box = element('div', parent, undefined, 'plot')
    if (options.heading) element('h3', this.box, options.heading)
    this.holder = element('div', this.box)
    this.holder.tabIndex = 0
    this.holder.setAttribute('role', 'img')
    this.holder.setAttribute('aria-label', title + '. Arrow keys move along the steps; the table has all values.')
    this.holder.addEventListener('keydown', event => this.key(event))
    this.note()
    tableBehind(this.box, 'Table', ['step', ...lines.map(one => one.label)], steps.length, place => (
      { cells: [options.stepName(place), ...lines.map(one => one.values[place])] }))
    this.draw()
  }

  note() {
    this.lines.forEach(({ label }, line) => {
      const odd = this.steps.filter((_, place) => this.options.isOdd(line, place))
      if (odd.length) element('p', this.box, `${label} is NaN or infinite in ${odd.length} columns, first at step ${odd[0]}`, 'state bad')
    })
  }

  draw() {
    if (this.plot) this.plot.destroy()
    const { band, logarithmic } = this.options, isShown = value => Number.isFinite(value) && (!logarithmic || value > 0)
    const values = this.lines.flatMap(one => Array.from(one.values).filter(isShown))
    const positive = values.length > 0 && values.every(value => value > 0)
    const axis = { stroke: colour('--fg'), grid: { stroke: colour('--line'), width: 1 }, ticks: { stroke: colour('--line') } }
    this.plot = new uPlot({
      width: Math.max(280, this.box.clientWidth), height: this.options.height,
      scales: { x: { time: false }, y: { distr: logarithmic || (positive && Math.max(...values) > 20 * Math.min(...values)) ? 3 : 1 } },
      series: [{ label: 'step' }, ...this.lines.map((one, place) => ({
        label: one.label, stroke: colour('--line' + place % 8), width: 1.6, dash: DASHES[place % DASHES.length],
        value: (_, value) => value === null ? '' : number(value), spanGaps: false,
      }))],
      bands: band ? [{ series: [3, 2], fill: colour('--line0') + '30' }] : [],
      axes: [axis, { ...axis, size: 80, values: (_, splits) => splits.map(one => one === null ? '' : number(one)) }],
      hooks: { draw: [plot => this.mark(plot)] },
    }, [this.steps, ...this.lines.map(one => Array.from(one.values, value => isShown(value) ? value : null))], this.holder)
  }

  mark(plot) {
    if (this.options.at === undefined) return
    const x = plot.valToPos(this.options.at, 'x', true), context = plot.ctx
    context.save()
    context.strokeStyle = colour('--bad')
    context.setLineDash([5, 4])
    context.beginPath()
    context.moveTo(x, plot.bbox.top)
    context.lineTo(x, plot.bbox.top + plot.bbox.height)
    context.stroke()
    context.restore()
  }

  key(event) {
    const way = { ArrowLeft: -1, ArrowRight: 1 }[event.key]
    if (!way) return
    this.place = Math.max(0, Math.min(this.steps.length - 1, (this.place === undefined ? -1 : this.place) + way))
    this.plot.setCursor({ left: this.plot.valToPos(this.steps[this.place], 'x'), top: 10 })
    event.preventDefault()
  }
}
